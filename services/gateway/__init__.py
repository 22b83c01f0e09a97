"""The gateway: the public HTTP API, any number of replicas, none of which owns anything."""
