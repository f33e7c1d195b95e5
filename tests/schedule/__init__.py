"""Tests of time: jobs put off, schedules, and who keeps the time."""
