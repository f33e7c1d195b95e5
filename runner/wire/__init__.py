"""The vocabulary that crosses process borders: records, states, names, codec and key table.

Imported by every package; imports the standard library only. Import the module you need
(``from runner.wire import spec``): this package itself loads nothing.
"""
