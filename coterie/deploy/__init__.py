"""Federations on real machines: transport, nodes, server jobs, wire format and keys."""
