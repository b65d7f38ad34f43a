"""Keep records on the disk until they are in SQL.

`log` appends records to a `segment`, in the form that `codec` gives them, and brings them to the disk, off the event
loop.
"""
