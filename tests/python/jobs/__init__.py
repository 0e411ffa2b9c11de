"""Jobs of real processes, for tests of faults: see `jobs.harness`."""
