-- A thread.
select thread, agent, user_id, model, next_position - 1 as entries,
  (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from used_at) * 1000)::bigint as used_ms
from threads where thread = %(thread)s
