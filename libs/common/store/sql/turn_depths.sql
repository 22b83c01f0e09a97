-- Open turns by state: how many, and the age of the oldest in seconds.
select state, count(*) as depth, extract(epoch from now() - min(created_at))::float8 as oldest_s
from turns where ended_at is null group by state
