"""Programs of the queue protocol, explored on machines that reorder memory accesses."""
