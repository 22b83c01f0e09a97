select max(version) as version from schema_migrations
