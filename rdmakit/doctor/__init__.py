"""Checks that say whether a machine and a job are set up right, and the cure where not.

``model``: what a check is and what it finds. ``context``: what a check may look at.
``checks/``: the checks, one small module for each subject. ``catalog``: all of them, in order.
``worker`` and ``supervise``: they run in a child process that may hang. ``nodes``: on every node
of a job. ``compare``: between nodes. Output is in ``rdmakit.report``.
"""
