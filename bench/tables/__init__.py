"""The tables of pages, from the records and the library. See command.py."""
