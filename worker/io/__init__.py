"""What is performed off the control loop: jobs, slots, writing.

Nothing here decides about a save, and nothing knows sockets of trainers.
"""
