select version, name from schema_migrations
