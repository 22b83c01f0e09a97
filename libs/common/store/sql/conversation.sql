-- The newest exchanges of a thread up to a turn, newest first: as many as there are to be, and as fit; the last one does.
with newest as (
  select t.number, e.text, r.text as reply,
    sum(octet_length(e.text) + coalesce(octet_length(r.text), 0)) over (order by t.number desc) as bytes
  from (
    select number, entry, reply from turns
    where thread = %(thread)s and number <= %(number)s
    order by number desc limit %(limit)s
  ) t
  join entries e on e.entry = t.entry left join entries r on r.entry = t.reply
)
select text, reply from newest where bytes <= %(bytes_max)s or number = %(number)s order by number desc
