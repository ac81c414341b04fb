"""The world: files in memory, sockets, processes, stores. torch only in `edge.torch`."""
