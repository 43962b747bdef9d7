"""Finding out what one machine is: sysfs, NVML and commands, through doors that tests can fake."""
