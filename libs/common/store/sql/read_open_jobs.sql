-- The records of those jobs that are open, with what their machines are given.
select j.*, r.args from job_records j join requests r using (id)
where id = any(%(ids)b::uuid[]) and r.ended_at is null
