-- The record of an idempotency key, if its retention has not passed.
select * from job_records
where scope = %(scope)s and key = %(key)s
  and (ended_at is null or ended_at > now() - %(retention_s)s * interval '1 second')
