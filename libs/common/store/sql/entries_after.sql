-- A thread's entries in their order, after a position.
select entry, thread, position, role, text, turn, (extract(epoch from created_at) * 1000)::bigint as created_ms
from entries where thread = %(thread)s and position > %(position)s
order by position limit %(limit)s
