-- Open jobs by state, and the age of the oldest (seconds).
select state, count(*) as depth, extract(epoch from now() - min(accepted_at))::float8 as oldest_s
from requests where ended_at is null group by state
