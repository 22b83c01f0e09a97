-- Steps of a task that are done, as an attempt may see them.
select checkpoint_name, state from absurd.get_task_checkpoint_states('turns', %(task)s::uuid, %(run)s::uuid)
