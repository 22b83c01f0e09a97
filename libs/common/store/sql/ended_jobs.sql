-- Jobs that ended in a window of age (seconds), in the order of their ends, after a cursor, for the sweeper.
select id::text as job, user_id, ended_at
from requests
where ended_at <= now() - %(older_than_s)s * interval '1 second'
  and ended_at > now() - %(younger_than_s)s * interval '1 second'
  and (%(after_job)s::uuid is null
    or (ended_at >= %(after_end)s::timestamptz
      and (ended_at, id) > (%(after_end)s::timestamptz, %(after_job)s::uuid)))
order by ended_at, id
limit %(limit)s
