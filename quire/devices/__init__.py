"""Where bytes live: each device has a budget, operations, and the memory behind pages."""
