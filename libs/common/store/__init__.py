"""Everything that touches Redis or Postgres: one file per concept, both ends of its protocol in it."""
