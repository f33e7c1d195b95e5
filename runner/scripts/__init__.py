"""The Lua scripts that change the queue, each atomic, and the form of a job's payload. Standard library only.

Called by the client (enqueue, kill) and the node agent's store (all others). Every script takes one JSON document as
ARGV[1]; its own header lists keys, arguments, reply and the race it closes.
"""
