"""Programs for those who work on the library: compile checks, timings, generated pages."""
