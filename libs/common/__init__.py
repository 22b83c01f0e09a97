"""The small library that gateway, worker and relay share: stores, and what every process does."""
