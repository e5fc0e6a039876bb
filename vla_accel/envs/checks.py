def check_env(env):
    pass
