-- The records of some jobs.
select * from job_records
where id = any(%(ids)b::uuid[])
