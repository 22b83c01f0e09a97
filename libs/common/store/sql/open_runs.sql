-- What should be followed.
select run, state, (extract(epoch from created_at) * 1000)::bigint as created_ms
from runs where ended_at is null order by run
