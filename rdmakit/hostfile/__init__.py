"""Hostfiles of all launchers: read, checked, converted, and what a launcher would do with one."""
