// HAMi's webhook without its scheduler, which would need an API server: the exported handler, its routes, device types and server
// as in HAMi's cmd/scheduler and chart. Built inside a checkout of HAMi, so with its own versions; see ../load.rs.
package main

import (
	"crypto/tls"
	"net/http"
	"os"
	"time"

	"github.com/julienschmidt/httprouter"
	"k8s.io/klog/v2"

	"github.com/Project-HAMi/HAMi/pkg/scheduler/config"
	"github.com/Project-HAMi/HAMi/pkg/scheduler/routes"
)

// Arguments: address, certificate, key.
func main() {
	config.SchedulerName = "hami-scheduler"
	config.ForceOverwriteDefaultScheduler = true
	config.InitDefaultDevices()
	router := httprouter.New()
	router.POST("/webhook", routes.WebHookRoute())
	server := &http.Server{
		Addr:              os.Args[1],
		Handler:           router,
		TLSConfig:         &tls.Config{},
		ReadHeaderTimeout: 15 * time.Second,
		ReadTimeout:       60 * time.Second,
	}
	klog.Fatal(server.ListenAndServeTLS(os.Args[2], os.Args[3]))
}
