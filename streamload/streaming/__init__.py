"""The loop of a load and its threads: read, cast, place."""
