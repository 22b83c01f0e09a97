-- What a machine announced in its hello.
insert into machines as m (user_id, machine, name, version, tools, last_epoch)
values (%(user)s, %(machine)s, %(name)s, %(version)s, %(tools)s, %(epoch)s)
on conflict (user_id, machine) do update
set name = excluded.name, version = excluded.version, tools = excluded.tools,
    last_epoch = greatest(m.last_epoch, excluded.last_epoch), seen_at = now()
