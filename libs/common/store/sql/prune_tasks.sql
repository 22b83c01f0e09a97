-- Forget tasks that ended long ago, with their attempts and checkpoints.
select absurd.cleanup_tasks('turns', %(retention_s)s::integer, %(limit)s::integer) as pruned
