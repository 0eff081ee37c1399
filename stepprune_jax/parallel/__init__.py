"""Devices: meshes and sharding rules, placement of arrays, processes, compiler options."""
