"""The messages of each service, one file each: frozen tagged structs, one union of requests, one of replies.

    control.py       every service: status, stop
    buffer.py        leases, results, draws, evaluation
    weight_sync.py   publication and fetching of weights

SCHEMA goes into every greeting; peers of another schema are refused with both numbers. Raise it with any
change to a message.
"""

SCHEMA = 2
