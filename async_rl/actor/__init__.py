"""Actors: one mailbox (a ZeroMQ ROUTER) per service, typed messages, deadlines.

wire.py      messages to frames and back; arrays travel as frames of their own
mailbox.py   the receiving side
remote.py    the asking side: greeting, heartbeats, reconnection
service.py   the life of a service process, from its address to its ordered stop
"""
