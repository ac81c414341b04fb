"""Files of shared memory: slots and pages, laid over a `ports.Memory`."""
