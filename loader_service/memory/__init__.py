"""Host memory: page-aligned buffers, the staging budget and its leases, tensor views."""
