-- Open jobs of one user by state, and the age of the oldest (seconds).
select state, count(*) as depth, extract(epoch from now() - min(accepted_at))::float8 as oldest_s
from requests where ended_at is null and user_id = %(user)s group by state
