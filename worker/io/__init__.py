"""Jobs outside the control loop (`job_runner`), their threads (`lanes`), slots, writing; and the sockets between nodes.

Nothing here decides about a save, or uses the socket for trainers. The jobs that copy to mirrors are `mirrors.jobs`.
"""
