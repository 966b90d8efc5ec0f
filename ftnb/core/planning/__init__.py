"""The parts of the planner (ftnb/core/planner.py): one state, and handlers grouped by what they are about."""
