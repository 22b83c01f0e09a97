-- The newest exchanges of a thread up to a turn, newest first.
select e.text, r.text as reply
from turns t join entries e on e.entry = t.entry left join entries r on r.entry = t.reply
where t.thread = %(thread)s and t.number <= %(number)s
order by t.number desc limit %(limit)s
