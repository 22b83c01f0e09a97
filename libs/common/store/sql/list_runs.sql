-- Ids of runs, newest first, before a cursor (time in milliseconds, id).
select run
from runs
where (%(state)s::text is null or state = %(state)s)
  and (%(before_ms)s::bigint is null
       or (created_at, run) < (to_timestamp(%(before_ms)s::float8 / 1000), %(before_run)s::text))
order by created_at desc, run desc
limit %(limit)s
