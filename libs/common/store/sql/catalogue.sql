-- The machine of a user that was seen last, and its catalogue.
select machine, name, version, tools, (extract(epoch from seen_at) * 1000)::bigint as seen_ms
from machines where user_id = %(user)s
order by last_epoch desc limit 1
