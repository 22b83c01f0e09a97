-- Threads, newest first (ids sort by time), before one.
select thread, agent, user_id, model, next_position - 1 as entries,
  (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from used_at) * 1000)::bigint as used_ms
from threads
where (%(users)s::text[] is null or user_id = any (%(users)s::text[]))
  and (%(agent)s::text is null or agent = %(agent)s)
  and (%(before)s::uuid is null or thread < %(before)s::uuid)
order by thread desc limit %(limit)s
