"""How ranks start, stall and end: launchers, the phase record, the watchdog."""
