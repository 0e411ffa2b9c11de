# Written by python/src/write_stub.py; do not edit.
# ruff: noqa
# fmt: off
"""The core of bascule. Private: use the names in bascule."""

from collections.abc import Sequence
import enum
from typing import Any


def version() -> str:
    """The library's version."""

class DType(enum.Enum):
    """The type of an element, by its safetensors name."""

    F32 = 1

    BF16 = 2

    F16 = 3

    F64 = 4

    F8_E4M3 = 5

    F8_E5M2 = 6

    I64 = 7

    I32 = 8

    I16 = 9

    I8 = 10

    U8 = 11

    BOOL = 12

    @property
    def itemsize(self) -> int: ...

class MemoryKind(enum.Enum):
    """What kind of memory a buffer is."""

    HOST = 0

    SHARED = 1

    DEVICE = 2

class LandingFunction(enum.Enum):
    """An elementwise function applied on landing."""

    NONE = 0

    NEG_EXP = 1

class LogicalTensor:
    """
    A tensor of the checkpoint.

    Parameters
    ----------
    name, shape
        Its own.
    dtype
        A source's publish dtype, a destination's own dtype.
    derived
        True for scales and codes of quantized tensors.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: DType, derived: bool = False) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> list[int]: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def derived(self) -> bool: ...

    def __repr__(self) -> str: ...

class Buffer:
    """Memory that a rank owns."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def kind(self) -> MemoryKind: ...

    @property
    def device(self) -> int: ...

    @property
    def fd(self) -> int: ...

    @property
    def fd_offset(self) -> int: ...

class Binding:
    """One box of one tensor <-> strided local memory."""

    @property
    def tensor(self) -> int:
        """Index in Layout.tensors."""

    @property
    def buffer(self) -> int:
        """Index in Layout.buffers."""

    @property
    def box(self) -> list[tuple[int, int]]: ...

    @property
    def byte_offset(self) -> int: ...

    @property
    def byte_strides(self) -> list[int]: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def function(self) -> LandingFunction: ...

class Alias:
    """A tied tensor: stored as its target."""

    @property
    def name(self) -> str: ...

    @property
    def target(self) -> str: ...

class Padding:
    """Destination bytes that nothing fills."""

    @property
    def buffer(self) -> int: ...

    @property
    def offset(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def stride(self) -> int: ...

class Layout:
    """All bindings of one rank, without the owners of its memory."""

    @property
    def tensors(self) -> list[LogicalTensor]: ...

    @property
    def buffers(self) -> list[Buffer]: ...

    @property
    def bindings(self) -> list[Binding]: ...

    @property
    def aliases(self) -> list[Alias]: ...

    @property
    def padding(self) -> list[Padding]: ...

    @property
    def unused(self) -> list[str]: ...

    @property
    def coordinates(self) -> list[int]: ...

    def set_memory(self, buffer: int, address: int, kind: MemoryKind, device: int, fd: int, fd_offset: int) -> None:
        """Give a buffer of `layout_from_json` its memory."""

    def to_json(self, indent: int) -> str: ...

    def validate(self) -> None: ...

    def check_destination_coverage(self) -> None: ...

def layout_from_json(text: str) -> Layout:
    """The buffers have no memory yet."""

class Mesh:
    """
    A grid of ranks with named axes.

    Rank numbers are row-major, the last axis fastest, as torch's DeviceMesh. No
    axes: one rank.

    Parameters
    ----------
    axis_names
        Unique and not empty.
    axis_sizes
        As many, none zero.
    """

    def __init__(self, axis_names: Sequence[str] = [], axis_sizes: Sequence[int] = []) -> None: ...

    @property
    def axis_names(self) -> list[str]: ...

    @property
    def axis_sizes(self) -> list[int]: ...

    @property
    def ranks(self) -> int:
        """How many ranks there are."""

    def coordinates_of(self, rank: int) -> list[int]:
        """Return the coordinates of a rank."""

    def __repr__(self) -> str: ...

class Placement:
    """What one mesh axis does to a tensor."""

    def __repr__(self) -> str: ...

def replicate() -> Placement:
    """Every rank along the axis holds all of it."""

def shard(dim: int) -> Placement:
    """
    Cut ``dim`` as torch.chunk does: parts of ceil(extent / ranks); the last ranks have less
    or nothing.
    """

def shard_parts(dim: int, parts: int) -> Placement:
    """
    Cut ``dim`` into ``parts`` equal parts; with more ranks than parts, neighbours share one.
    """

def shard_padded(dim: int, padded: int) -> Placement:
    """
    Pad ``dim`` to ``padded`` elements, then cut it; the array holds the padding too.
    """

def strided_shard(dim: int, split_factor: int) -> Placement:
    """
    DTensor's _StridedShard: cut after the shard of ``dim`` on the axes to the right.
    """

def at(*coordinates: int) -> Placement:
    """
    Only ranks with these coordinates along the axis hold it: experts, pipeline stages.
    """

class Block:
    """
    How the memory of one array is made of parts of logical tensors.

    An array at one rank has a local shape; where `at` leaves a part on other
    ranks only, the part takes no room in the array.
    """

    @staticmethod
    def of(tensor: LogicalTensor, placements: dict[str, Placement] = {}) -> Block:
        """The rank's part of a tensor, or of the slice of it that `slice` picks."""

    @staticmethod
    def concat(dim: int, parts: Sequence[Block]) -> Block:
        """
        Parts one after another along an existing dimension: fused gate/up, QKV.
        """

    @staticmethod
    def stack(parts: Sequence[Block]) -> Block:
        """
        Parts of equal local shape along a new first dimension: stacked experts.
        """

    @staticmethod
    def interleave(dim: int, parts: Sequence[Block], tiles: Sequence[int] = []) -> Block:
        """
        Take ``tiles[i]`` indices of part i in turn along ``dim``; no tiles: one each.
        """

    def slice(self, dim: int, begin: int, end: int, step: int = 1) -> Block:
        """
        Only these indices of a logical dimension; placements then cut the slice.
        """

    def transpose(self, order: Sequence[int]) -> Block:
        """Dimension i of the result is dimension ``order[i]`` of this block."""

    def pad_to(self, dim: int, extent: int) -> Block:
        """Pad the end of a dimension of the array to ``extent``."""

    def landing(self, function: LandingFunction) -> Block:
        """Apply an elementwise function on landing."""

def fused_qkv(q: LogicalTensor, k: LogicalTensor, v: LogicalTensor, kv_heads: int, axis: str) -> Block:
    """
    [q; k; v] along dimension 0, cut by heads along ``axis``. With more ranks than kv heads,
    neighbours share one. Weights and biases alike.
    """

def fused_gate_up(gate: LogicalTensor, up: LogicalTensor, placements: dict[str, Placement] = {}, interleaved: bool = False) -> Block:
    """[gate; up] along dimension 0, or row by row."""

class FlatTensor:
    """A tensor of a flat buffer."""

    def __init__(self, tensor: LogicalTensor, placements: dict[str, Placement] = {}, start: int = -1) -> None: ...

class FlatBuffer:
    """
    Tensors one after another, row-major, in one buffer that ranks cut at any element.

    FSDP1's and Megatron's flat parameters.

    Parameters
    ----------
    tensors
        In order; each right after the one before unless it has a ``start``.
    axes
        Of the mesh, along which the buffer is cut; the first is the most significant.
    cuts
        Rank r holds elements ``[cuts[r], cuts[r + 1])``; none: parts of
        ceil(total / ranks).
    """

    def __init__(self, tensors: Sequence[FlatTensor], axes: Sequence[str], cuts: Sequence[int] = []) -> None: ...

class LayoutBuilder:
    """See bascule.layout.LayoutBuilder."""

    def __init__(self, mesh: Mesh, coordinates: Sequence[int]) -> None: ...

    def local_shape(self, block: Block) -> list[int] | None:
        """The shape of a block's array; None where all of it is at other ranks."""

    def local_elements(self, flat: FlatBuffer) -> int:
        """How many elements of the flat buffer the rank holds."""

    def add_buffer(self, name: str, address: int, bytes: int, kind: MemoryKind, device: int, fd: int, fd_offset: int) -> int: ...

    def add_elsewhere(self, block: Block) -> None:
        """Add a block of which this rank holds nothing."""

    def add(self, block: Block, buffer: int, byte_offset: int, byte_strides: Sequence[int], dtype: DType | None) -> None: ...

    def add_flat_elsewhere(self, flat: FlatBuffer) -> None: ...

    def add_flat(self, flat: FlatBuffer, buffer: int, byte_offset: int, dtype: DType | None) -> None: ...

    def add_alias(self, name: str, target: str) -> None: ...

    def add_unused(self, pattern: str) -> None: ...

    def add_padding(self, buffer: int, offset: int, bytes: int, count: int, stride: int) -> None: ...

    def build(self) -> Layout: ...

class World:
    """A mesh and what its ranks hold."""

    @staticmethod
    def from_json(text: str) -> World:
        """A world document, or a layout as the world that it belongs to."""

    @property
    def mesh(self) -> Mesh: ...

    def memory_of(self, rank: int) -> tuple[int, int]:
        """Bytes of the rank's weights, and of one arena."""

class PlanPreview:
    """
    The plan of trainers and engines. Ranks are numbered trainers first, then engine by engine.
    """

    @staticmethod
    def prepare(trainers: World, trainer_nodes: Sequence[int], rollouts: World, engines: Sequence[tuple[str, Sequence[int]]]) -> PlanPreview:
        """Engines are (name, node of each rank), sorted by name."""

    def check_engines(self) -> None:
        """
        Raise where an engine neither wants nor lists as unused what trainers publish.
        """

    def part_of(self, index: int) -> tuple[int, list[tuple[int, int, int, bool]]]:
        """
        What a rank fetches: pieces, and links of (source, bytes, chunks, same node).
        """

    def bound(self, *, node_memory: int, trainer_egress: int, rollout_egress: int, rollout_ingress: int) -> dict[str, int]:
        """
        The terms of the lower bound of EWTT in nanoseconds, from bytes a second; 0: unknown.
        """

class ArenaMode(enum.Enum):
    """Where published weights lie while peers read them."""

    AUTO = 0

    DEVICE = 1

    HOST = 2

    DIRECT = 3

class ShadowMode(enum.Enum):
    """Where staged bytes live until commit."""

    AUTO = 0

    DEVICE = 1

    HOST = 2

    NONE = 3

class PublicationState(enum.Enum):
    """What became of a published version."""

    OPEN = 0

    AVAILABLE = 1

    ABORTED = 2

    RETIRED = 3

    UNKNOWN = 4

class ReceiverState(enum.Enum):
    """Where one rollout rank is in an update."""

    IDLE = 0

    STAGING = 1

    READY = 2

    VERIFIED = 3

    IN_DOUBT = 4

    DECIDED = 5

    COMMITTING = 6

    POISONED = 7

class JobOptions:
    """See bascule.Job."""

    def __init__(self, *, name: str, coordinator: str, token: str, listen: str, heartbeat: float, socket_directory: str) -> None: ...

class Publication:
    """See bascule.Publication."""

    @property
    def id(self) -> tuple[int, int]: ...

    def wait(self, timeout: float) -> None: ...

    def state(self, timeout: float) -> PublicationState: ...

    def release(self, timeout: float) -> None: ...

    def report(self) -> dict[str, Any]: ...

class WeightSender:
    """See bascule.WeightSender."""

    @staticmethod
    def connect(*, job: JobOptions, rank: int, world_size: int, arena: ArenaMode, threads: int, versions_held: int, digest: bool, layout: Layout, owners: object, timeout: float) -> WeightSender: ...

    def publish(self, version: int, timeout: float) -> Publication: ...

    def update_layout(self, layout: Layout, owners: object, timeout: float) -> None: ...

    @property
    def term(self) -> int: ...

    @property
    def coordinator(self) -> str: ...

    def close(self, timeout: float) -> None: ...

class Update:
    """See bascule.Update."""

    @property
    def id(self) -> tuple[int, int]: ...

    def stage(self, timeout: float) -> None: ...

    def wait_staged(self, timeout: float) -> None: ...

    def ready(self, timeout: float) -> bool: ...

    def decide(self, timeout: float) -> None: ...

    def commit(self, timeout: float) -> None: ...

    def abort(self, timeout: float) -> None: ...

    def report(self) -> dict[str, Any]: ...

class WeightReceiver:
    """See bascule.WeightReceiver."""

    @staticmethod
    def connect(*, job: JobOptions, engine: str, rank: int, world_size: int, shadow: ShadowMode, threads: int, digest: bool, layout: Layout, owners: object, timeout: float) -> WeightReceiver: ...

    def poll(self, timeout: float) -> Update | None: ...

    def open(self, term: int, version: int) -> Update: ...

    @property
    def state(self) -> ReceiverState: ...

    @property
    def serving(self) -> tuple[int, int] | None: ...

    def check_servable(self) -> None: ...

    def check_engine_servable(self, timeout: float) -> None: ...

    def set_post_commit_hook(self, callable: object | None) -> None: ...

    def take_hook_error(self) -> BaseException | None: ...

    def audit(self, timeout: float) -> None: ...

    def update_layout(self, layout: Layout, owners: object, timeout: float) -> None: ...

    def close(self, timeout: float) -> None: ...

def coordinator_status_json(address: str, token: str, timeout: float) -> str: ...

class CoordinatorServer:
    """See bascule.CoordinatorServer."""

    @staticmethod
    def start(job: JobOptions) -> CoordinatorServer: ...

    @property
    def address(self) -> str: ...

    def status_json(self) -> str: ...

    def stop(self) -> None: ...

class Progress:
    """Bytes compared so far, and in all."""

    def __init__(self) -> None: ...

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...

class Comparison:
    """See bascule.verify.Comparison."""

    @property
    def term(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def tensors(self) -> int: ...

    @property
    def elements(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def different(self) -> list[str]: ...

    @property
    def only_left(self) -> list[str]: ...

    @property
    def only_right(self) -> list[str]: ...

    @property
    def unreadable(self) -> list[str]: ...

def compare_ranks(job: JobOptions, left: str, right: str, dtype: DType | None, progress: Progress | None, timeout: float) -> Comparison: ...

def compare_with_files(job: JobOptions, left: str, files: Sequence[tuple[str, int, int]], owners: object, dtype: DType | None, progress: Progress | None, timeout: float) -> Comparison: ...

def take_logs(timeout: float) -> list[tuple[int, str]]:
    """
    Lines of the core's log since the last call, as (level, text); waits for one.
    """

def wait_abandoned(timeout: float) -> bool:
    """
    Wait for calls that Ctrl-C left in the background; True when none is left.
    """

def forget_abandoned() -> None:
    """Called in a child after fork."""

def park_threads() -> None:
    """
    Called last at interpreter exit: other threads never come back from the core.
    """
