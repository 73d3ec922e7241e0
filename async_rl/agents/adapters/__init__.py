"""Environments and tools of other libraries; each is imported by the function that needs it."""
