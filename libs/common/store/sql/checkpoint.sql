-- Checkpoint a step (rule 30); see the function.
select towline_checkpoint(%(task)s::uuid, %(run)s::uuid, %(step)s::text, %(state)s::jsonb, %(claim_s)s::integer) as done
