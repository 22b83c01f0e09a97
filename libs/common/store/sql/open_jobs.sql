-- Open jobs accepted in a window of age (seconds), after a cursor, for the sweeper.
select id::text as job, user_id
from requests
where ended_at is null and deadline_at > now()
  and accepted_at <= now() - %(older_than_s)s * interval '1 second'
  and accepted_at > now() - %(younger_than_s)s * interval '1 second'
  and (%(after)s::uuid is null or id > %(after)s::uuid)
order by id
limit %(limit)s
