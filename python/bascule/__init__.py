"""Bascule moves policy weights from trainers to rollout engines.

Planned once, and every update is proved by something other than the code that moved it::

    job = bascule.Job(name="run1", coordinator="host:7070", token=token)

    # a trainer rank
    with bascule.WeightSender.connect(job, rank=3, world_size=8, layout=layout) as sender:
        publication = sender.publish(version)  # the weights may change when it returns

    # a rollout rank
    with bascule.WeightReceiver.connect(
        job, engine="e0", rank=1, world_size=4, layout=layout
    ) as receiver:
        update = receiver.poll()  # one answer for all ranks of the engine
        if update is not None:
            update.stage()  # in the background, verified as it lands; generation goes on
            update.wait_staged()
            if update.ready():
                update.commit()  # decide and switch: the only part that pauses the engine

Nothing starts when it is imported. In a child that was forked after its parent connected, every
call raises `bascule.Forked`: start such processes with ``spawn``.
"""

from bascule import layout
from bascule._bascule import version as _version
from bascule.coordinator import CoordinatorServer, coordinator_status
from bascule.errors import (
    Aborted,
    AlreadyExists,
    Busy,
    Closed,
    DataLoss,
    DeadlineExceeded,
    Error,
    Forked,
    InDoubt,
    Internal,
    InvalidArgument,
    NotDecided,
    NotFound,
    PermissionDenied,
    Poisoned,
    ResourceExhausted,
    Retired,
    StaleTerm,
    Unavailable,
    Unimplemented,
    VersionMismatch,
)
from bascule.job import HOST_HERE, Job
from bascule.layout import Layout, LayoutBuilder
from bascule.receiver import ReceiverState, ShadowMode, Update, WeightReceiver
from bascule.report import LinkReport, Phases, Report, VersionId
from bascule.sender import ArenaMode, Publication, PublicationState, WeightSender

__version__ = _version()

__all__ = [
    "HOST_HERE",
    "Aborted",
    "AlreadyExists",
    "ArenaMode",
    "Busy",
    "Closed",
    "CoordinatorServer",
    "DataLoss",
    "DeadlineExceeded",
    "Error",
    "Forked",
    "InDoubt",
    "Internal",
    "InvalidArgument",
    "Job",
    "Layout",
    "LayoutBuilder",
    "LinkReport",
    "NotDecided",
    "NotFound",
    "PermissionDenied",
    "Phases",
    "Poisoned",
    "Publication",
    "PublicationState",
    "ReceiverState",
    "Report",
    "ResourceExhausted",
    "Retired",
    "ShadowMode",
    "StaleTerm",
    "Unavailable",
    "Unimplemented",
    "Update",
    "VersionId",
    "VersionMismatch",
    "WeightReceiver",
    "WeightSender",
    "__version__",
    "coordinator_status",
    "layout",
]
