-- A user's jobs in one scope (null: its own), newest first, before a cursor (a job id; ids sort by time).
select * from job_records
where user_id = %(user)s and scope = coalesce(%(scope)s::text, 'user:' || %(user)s)
  and (%(state)s::text is null or state = %(state)s)
  and (%(key)s::text is null or key = %(key)s)
  and (%(before)s::uuid is null or id < %(before)s::uuid)
order by id desc
limit %(limit)s
