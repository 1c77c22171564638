"""Schedules that decide in which steps factors are updated and decomposed."""
