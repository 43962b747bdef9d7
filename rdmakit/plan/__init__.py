"""Schedules as data: what each rank does in a collective, and a simulator that runs it."""
